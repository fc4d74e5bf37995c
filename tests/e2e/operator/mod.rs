//! The operator itself: outages, permissions, pages, and the secrets that it must not show.

pub mod hostile_network;
pub mod outage;
pub mod pages;
pub mod permissions;
pub mod secrets;
