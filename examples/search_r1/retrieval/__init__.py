"""A search server for agents: Search-R1's requests and answers, BM25 or dense, on loopback."""
