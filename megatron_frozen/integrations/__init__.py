"""What other frameworks need to work with these layers; one file per framework."""
