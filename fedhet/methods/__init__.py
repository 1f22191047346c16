"""Methods: their declarations (`Method`, `Traits`), keys (`option`) and sharing maps (`Sharing`), and the registry."""
