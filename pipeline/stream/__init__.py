"""What only a stream has: messages, acknowledgement, duplicates, and answers by request."""

from pipeline.codec import register_record_coder

register_record_coder()  # a stream that is updated goes on with the records in its runner's state
