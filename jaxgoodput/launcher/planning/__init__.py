"""Plans for devices that need not be there: their names and compilers, the table, and what a strategy does."""
