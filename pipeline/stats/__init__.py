"""What is counted while a job runs, and what is made of it."""
