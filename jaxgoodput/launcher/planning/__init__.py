"""Plans for devices that need not be there: their names and compilers, and what is printed."""
