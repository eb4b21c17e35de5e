"""cuDNN's attention through its front end."""
