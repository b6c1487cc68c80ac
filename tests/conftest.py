"""Property tests are the same in every run, and never fail because a machine is slow. Ctrl-C interrupts, as at a terminal."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "repeatable", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# A shell starts background jobs with interrupts ignored, and Python leaves it at that, also in the programs that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
