"""What comes from outside, made up at random: short with the suite, long with FUZZ=1 (FUZZ_EXAMPLES cases a test)."""
