//! A cache with expiring values and at most one concurrent fetch per key.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use futures::future::BoxFuture;

use crate::lock;

/// Callers that miss the same key share one fetch: the first one fetches, the others wait. A failed fetch is not
/// shared; the next caller retries.
pub struct ExpiringCache<K, V> {
    capacity: usize,
    slots: Mutex<HashMap<K, Slot<V>>>,
}

/// Boxed to keep the callers' futures small: fetches are nested.
pub type Fetch<'a, V, E> = BoxFuture<'a, Result<(V, Duration), E>>;

type Slot<V> = Arc<tokio::sync::Mutex<Option<Entry<V>>>>;

struct Entry<V> {
    value: V,
    /// `None` never expires.
    expires: Option<Instant>,
}

impl<V> Entry<V> {
    fn is_fresh(&self) -> bool {
        self.expires.is_none_or(|expires| Instant::now() < expires)
    }
}

impl<K: Clone + Eq + Hash, V: Clone> ExpiringCache<K, V> {
    /// Keeps about `capacity` keys. Expired entries, then those that expire first, are evicted.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, slots: Mutex::default() }
    }

    /// The cached value, or the result of `fetch`, which also returns its time to live. On a hit `fetch` is dropped
    /// without being polled.
    pub async fn get_or_fetch<E>(&self, key: K, fetch: Fetch<'_, V, E>) -> Result<V, E> {
        let slot = self.slot(key);
        let mut entry = slot.lock().await;
        if let Some(entry) = entry.as_ref().filter(|entry| entry.is_fresh()) {
            return Ok(entry.value.clone());
        }
        let (value, valid_for) = fetch.await?;
        *entry = Some(Entry { value: value.clone(), expires: Instant::now().checked_add(valid_for) });
        Ok(value)
    }

    /// The last value of a key, expired or not.
    pub async fn last(&self, key: &K) -> Option<V> {
        let slot = lock(&self.slots).get(key).cloned()?;
        let entry = slot.lock().await;
        entry.as_ref().map(|entry| entry.value.clone())
    }

    /// Makes the next caller fetch again, and keeps the value for [`Self::last`].
    #[cfg(test)]
    pub async fn expire(&self, key: &K) {
        let slot = lock(&self.slots).get(key).cloned();
        if let Some(slot) = slot {
            slot.lock().await.iter_mut().for_each(|entry| entry.expires = Some(Instant::now()));
        }
    }

    /// Makes the next caller fetch again.
    pub async fn invalidate(&self, key: &K) {
        let slot = lock(&self.slots).get(key).cloned();
        if let Some(slot) = slot {
            *slot.lock().await = None;
        }
    }

    fn slot(&self, key: K) -> Slot<V> {
        let mut slots = lock(&self.slots);
        if slots.len() >= self.capacity && !slots.contains_key(&key) {
            // A locked slot is being fetched.
            slots.retain(|_, slot| slot.try_lock().map_or(true, |entry| entry.as_ref().is_some_and(Entry::is_fresh)));
            if slots.len() >= self.capacity {
                let expiry = |slot: &Slot<V>| slot.try_lock().ok().map(|entry| entry.as_ref().and_then(|e| e.expires));
                let first = slots.iter().filter_map(|(key, slot)| Some((expiry(slot)?, key)));
                // `None` sorts first but never expires, so rank it last.
                let first = first.min_by_key(|(expires, _)| (expires.is_none(), *expires)).map(|(_, key)| key.clone());
                first.map(|key| slots.remove(&key));
            }
        }
        slots.entry(key).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::atomic::{AtomicU32, Ordering},
    };

    use futures::FutureExt;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// Fetches 1, 2, 3, …
    struct Source(AtomicU32);

    impl Source {
        async fn next(&self, valid_for: Duration) -> Result<(u32, Duration), Infallible> {
            tokio::task::yield_now().await;
            Ok((self.0.fetch_add(1, Ordering::SeqCst) + 1, valid_for))
        }
    }

    #[tokio::test]
    async fn callers_of_one_key_share_a_fetch() {
        let (cache, source) = (ExpiringCache::new(8), Source(AtomicU32::new(0)));
        let get = |key: &'static str| cache.get_or_fetch(key, source.next(HOUR).boxed());
        let (first, second, other) = tokio::join!(get("a"), get("a"), get("b"));
        assert_eq!(first, second);
        assert_ne!(first, other);
    }

    #[tokio::test]
    async fn a_failed_fetch_is_not_shared() {
        let cache = ExpiringCache::new(8);
        assert_eq!(cache.get_or_fetch("a", async { Err("down") }.boxed()).await, Err::<u32, _>("down"));
        assert_eq!(cache.get_or_fetch("a", async { Ok::<_, &str>((1, HOUR)) }.boxed()).await, Ok(1));
    }

    #[tokio::test]
    async fn an_expired_or_invalidated_value_is_fetched_again_and_the_last_one_is_kept() {
        let (cache, source) = (ExpiringCache::new(8), Source(AtomicU32::new(0)));
        assert_eq!(cache.last(&"a").await, None);
        assert_eq!(cache.get_or_fetch("a", source.next(Duration::ZERO).boxed()).await, Ok(1));
        assert_eq!(cache.last(&"a").await, Some(1));
        assert_eq!(cache.get_or_fetch("a", source.next(HOUR).boxed()).await, Ok(2));
        assert_eq!(cache.get_or_fetch("a", source.next(HOUR).boxed()).await, Ok(2));
        cache.invalidate(&"a").await;
        assert_eq!(cache.get_or_fetch("a", source.next(Duration::MAX).boxed()).await, Ok(3));
        assert_eq!(cache.get_or_fetch("a", source.next(HOUR).boxed()).await, Ok(3), "it never expires");
    }

    #[tokio::test]
    async fn a_full_cache_evicts_what_expires_first() {
        let (cache, source) = (ExpiringCache::new(2), Source(AtomicU32::new(0)));
        for (key, valid_for) in [("never", Duration::MAX), ("soon", HOUR), ("later", 2 * HOUR)] {
            cache.get_or_fetch(key, source.next(valid_for).boxed()).await.unwrap();
        }
        assert_eq!((cache.last(&"never").await, cache.last(&"soon").await), (Some(1), None));
        assert_eq!(cache.last(&"later").await, Some(3));
    }
}
