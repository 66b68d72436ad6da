"""What would happen, and how others are told to do it: plain arithmetic over layouts, no torch."""
