"""APIs that clients speak: their requests, answers, streams and errors."""
