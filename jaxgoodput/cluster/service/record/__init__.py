"""The record of a cluster: events, the state that they make up, and the journal that stores them."""
