"""The eager runtime: what stands between a plan and PyTorch. Private; `legroom.fit` is the way in."""
