"""Getting ready: what happens between `fit()` and the first step."""
