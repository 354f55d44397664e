"""The loop that every training runs, and its supplier of packed documents."""
