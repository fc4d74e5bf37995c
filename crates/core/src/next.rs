//! When an object is reconciled again.

use std::time::Duration;

use jiff::Timestamp;

/// A change of the object, or of one it depends on, triggers a reconciliation earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    AwaitChange,
    After(Duration),
    At(Timestamp),
}
