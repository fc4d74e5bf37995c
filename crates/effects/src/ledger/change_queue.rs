//! Coalescing queue: deduplicates keys until its reader drains them.

use std::{
    collections::HashSet,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use tokio::sync::Notify;

/// Supports a single reader.
pub struct ChangeQueue<K> {
    pending: Mutex<HashSet<K>>,
    enqueued: Notify,
}

impl<K> Default for ChangeQueue<K> {
    fn default() -> Self {
        Self { pending: Mutex::default(), enqueued: Notify::new() }
    }
}

impl<K: Hash + Eq + Send + 'static> ChangeQueue<K> {
    pub fn enqueue(&self, key: K) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).insert(key);
        self.enqueued.notify_one();
    }

    /// Pending keys in batches. Each batch collects for `window` after the first key.
    pub fn batches(self: &Arc<Self>, window: Duration) -> impl Stream<Item = HashSet<K>> + Send + use<K> {
        stream::unfold(self.clone(), move |queue| async move {
            loop {
                queue.enqueued.notified().await;
                tokio::time::sleep(window).await;
                let batch = std::mem::take(&mut *queue.pending.lock().unwrap_or_else(PoisonError::into_inner));
                if !batch.is_empty() {
                    return Some((batch, queue));
                }
            }
        })
    }

    /// The keys of [`Self::batches`], one by one.
    pub fn stream(self: &Arc<Self>, window: Duration) -> impl Stream<Item = K> + Send + use<K> {
        self.batches(window).flat_map(stream::iter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_is_deduplicated_until_drained_and_then_enqueued_again() {
        let queue = Arc::new(ChangeQueue::default());
        let mut batches = Box::pin(queue.batches(Duration::from_millis(1)));
        ["a", "b", "a"].into_iter().for_each(|key| queue.enqueue(key));
        assert_eq!(batches.next().await, Some(HashSet::from(["a", "b"])));
        queue.enqueue("a");
        assert_eq!(batches.next().await, Some(HashSet::from(["a"])));
    }
}
