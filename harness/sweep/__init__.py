"""What measures every plan on every case: devices, a process for each backend, and the order of their turns."""
