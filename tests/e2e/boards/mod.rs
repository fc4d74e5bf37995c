//! Claims on board pools, and the health of their workers.

pub mod claim;
pub mod device_plugin;
pub mod health;
pub mod refusals;
