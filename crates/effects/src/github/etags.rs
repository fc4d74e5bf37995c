//! Answers to repeated questions, with their entity tags: GitHub does not count an answer that has not changed.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex},
};

use http::HeaderValue;

use crate::lock;

/// The memory for answers; the oldest are dropped.
const MAX_BYTES: usize = 4 << 20;

pub struct Answers<K>(Mutex<State<K>>);

struct State<K> {
    by_key: HashMap<K, Answer>,
    /// Oldest first.
    order: VecDeque<K>,
    bytes: usize,
}

impl<K> Default for Answers<K> {
    fn default() -> Self {
        Self(Mutex::new(State { by_key: HashMap::new(), order: VecDeque::new(), bytes: 0 }))
    }
}

#[derive(Clone)]
pub struct Answer {
    pub tag: HeaderValue,
    pub text: Arc<str>,
}

impl<K: Clone + Eq + std::hash::Hash> Answers<K> {
    pub fn get(&self, key: &K) -> Option<Answer> {
        lock(&self.0).by_key.get(key).cloned()
    }

    pub fn keep(&self, key: K, tag: HeaderValue, text: &str) {
        let mut state = lock(&self.0);
        state.bytes += text.len();
        match state.by_key.insert(key.clone(), Answer { tag, text: text.into() }) {
            Some(before) => state.bytes -= before.text.len(),
            None => state.order.push_back(key),
        }
        while state.bytes > MAX_BYTES {
            let Some(oldest) = state.order.pop_front() else { break };
            state.bytes -= state.by_key.remove(&oldest).map_or(0, |dropped| dropped.text.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_answers_make_room() {
        let answers = Answers::default();
        let tag = HeaderValue::from_static("x");
        let half = "-".repeat(MAX_BYTES / 2);
        for key in ["a", "b", "b", "c"] {
            answers.keep(key, tag.clone(), &half);
        }
        assert_eq!(["a", "b", "c"].map(|key| answers.get(&key).is_some()), [false, true, true]);
        answers.keep("d", tag, &"-".repeat(MAX_BYTES + 1));
        assert!(["b", "c", "d"].iter().all(|key| answers.get(key).is_none()), "nothing may be larger than the memory");
    }
}
