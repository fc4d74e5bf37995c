//! When an object is reconciled again.

use std::time::Duration;

use jiff::Timestamp;

/// A change of the object, or of what it depends on, always comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    AwaitChange,
    After(Duration),
    At(Timestamp),
}
