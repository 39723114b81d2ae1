"""Generated from protos/kvbraid/v1 by tools/gen_protos.py. Never edited."""
