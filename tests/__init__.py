"""Tests, demos and benches. SIGTERM ends them as Ctrl-C does, so that the processes which they have started end with them."""

import signal
import threading

if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
