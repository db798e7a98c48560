"""What a job shows while it runs, as views of its `JobStats`: metrics, health checks and a live page, over HTTP."""
