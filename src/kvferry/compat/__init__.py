"""kvferry inside serving engines that know nothing of it; an engine is imported only by its own package."""
