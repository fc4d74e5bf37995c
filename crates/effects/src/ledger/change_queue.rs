//! Who has something to look at: names wait here until their reader comes, each once, however often they are told.

use std::{
    collections::HashSet,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use tokio::sync::Notify;

/// For one reader.
pub struct ChangeQueue<K> {
    waiting: Mutex<HashSet<K>>,
    told: Notify,
}

impl<K> Default for ChangeQueue<K> {
    fn default() -> Self {
        Self { waiting: Mutex::default(), told: Notify::new() }
    }
}

impl<K: Hash + Eq + Send + 'static> ChangeQueue<K> {
    pub fn tell(&self, name: K) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
        self.told.notify_one();
    }

    /// What is told from now on, in batches that gather for as long as `window`.
    pub fn batches(self: &Arc<Self>, window: Duration) -> impl Stream<Item = HashSet<K>> + Send + use<K> {
        stream::unfold(self.clone(), move |news| async move {
            loop {
                news.told.notified().await;
                tokio::time::sleep(window).await;
                let batch = std::mem::take(&mut *news.waiting.lock().unwrap_or_else(PoisonError::into_inner));
                if !batch.is_empty() {
                    return Some((batch, news));
                }
            }
        })
    }

    /// The same, one by one.
    pub fn stream(self: &Arc<Self>, window: Duration) -> impl Stream<Item = K> + Send + use<K> {
        self.batches(window).flat_map(stream::iter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_told_often_comes_once_and_what_comes_later_comes_again() {
        let news = Arc::new(ChangeQueue::default());
        let mut batches = Box::pin(news.batches(Duration::from_millis(1)));
        ["a", "b", "a"].into_iter().for_each(|name| news.tell(name));
        assert_eq!(batches.next().await, Some(HashSet::from(["a", "b"])));
        news.tell("a");
        assert_eq!(batches.next().await, Some(HashSet::from(["a"])));
    }
}
