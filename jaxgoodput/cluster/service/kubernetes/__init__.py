"""The service on Kubernetes: manifests to install it, and jobs whose processes are pods."""
