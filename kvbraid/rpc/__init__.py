"""gRPC servers and channels as every role uses them; see `server.py` and `channels.py`."""
