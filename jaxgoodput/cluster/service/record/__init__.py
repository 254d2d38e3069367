"""What is known of a cluster: events, the state that they make, the journal that keeps them."""
