"""What the service answers over HTTP: routes, who may use them, the page."""
