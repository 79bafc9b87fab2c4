"""Answer queries about a rank's objects without running user code."""
