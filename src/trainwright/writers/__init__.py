"""Writers: each receives the storage at a log line; none has access to the trainer."""
