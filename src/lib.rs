//! Paddock: GitHub Actions runners for Kubernetes.

pub mod api;
