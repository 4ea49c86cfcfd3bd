from __future__ import annotations

from hypothesis import settings

# No deadline for an example: on a busy machine it fails tests that are right. Tests about time measure it themselves.
settings.register_profile("legroom", deadline=None, max_examples=50)
settings.load_profile("legroom")
