"""Who is told: each writer is handed the storage at a log line and never sees the trainer."""
