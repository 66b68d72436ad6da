"""What happened: figures, where the time went, and what runs leave behind."""
