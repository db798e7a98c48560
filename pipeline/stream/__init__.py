"""What only a stream has: messages, acknowledgement, duplicates, and answers by request."""
