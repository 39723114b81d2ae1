"""Metrics and logs. Knows nothing of gRPC, tensors or requests' contents."""
