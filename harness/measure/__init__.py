"""What runs in the process of one backend: inputs timed, errors taken, numbers judged."""
