//! Paddock: GitHub Actions runners for Kubernetes.
//!
//! The layers, each importing only those before it: [`api`] (the CRDs), [`plan`] (decisions: no I/O, time passed in),
//! [`effects`] (AWS, GitHub, Kubernetes: one adapter each), [`controllers`] (wiring), [`web`]. `tests/layers.rs`
//! enforces it; `docs/architecture.md` shows the flow.

pub mod api;
pub mod controllers;
pub mod effects;
pub mod leader;
pub mod metrics;
pub mod plan;
pub mod run;
pub mod settings;
pub mod stores;
pub mod telemetry;
pub mod web;
