//! Paddock's operator: GitHub Actions runners for Kubernetes.
//!
//! The crates, each using only those before it: `paddock-record` (records that the operator and the agents exchange),
//! `paddock-core` (API and decisions), `paddock-effects` (AWS, GitHub, Kubernetes), and this one: [`controllers`] and
//! [`webhook`] gather facts, ask `core`, and act through `effects`; [`web`] serves dashboards.
//! See `docs/architecture.md`.

pub mod controllers;
pub mod run;
pub mod settings;
pub mod telemetry;
pub mod web;
pub mod webhook;

pub use paddock_core::api;
