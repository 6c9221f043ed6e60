"""What a training process runs: torch and this package, never transformers or the compiler."""
