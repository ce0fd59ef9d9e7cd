"""What is to be proven on a GPU: `make test-gpu`. What is cheap enough runs on the CPU as well, by the same tests."""
