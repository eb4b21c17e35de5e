"""torch's own attention kernels, one backend each."""
