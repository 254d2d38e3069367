"""One decision for a program that runs jobs itself: `jaxgoodput decide`, JSON in and JSON out."""
