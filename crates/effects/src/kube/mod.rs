//! Kubernetes: clients, leader election, caches, events and writes.

pub mod client;
pub mod events;
pub mod lanes;
pub mod leader;
pub mod objects;
pub mod stores;
