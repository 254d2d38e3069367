"""The service over HTTP: routes, access control, the web page and metrics."""
