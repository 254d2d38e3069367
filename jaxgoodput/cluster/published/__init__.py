"""Published policies and research artifacts, for comparison with our own."""
