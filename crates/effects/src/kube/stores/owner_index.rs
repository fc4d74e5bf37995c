//! An index of objects by owner, next to the cache that has them by name.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher,
    sync::{Arc, PoisonError, RwLock},
};

use kube::{
    Resource,
    runtime::{
        reflector::{ObjectRef, Store, store::Writer},
        watcher,
    },
};

/// Objects by their owner.
pub struct OwnerIndex<K> {
    owner: fn(&K) -> Option<&str>,
    hasher: RandomState,
    /// Keyed by a hash, because the owners' names would take more memory than the rest of the index.
    members: RwLock<HashMap<u64, Vec<Arc<K>>>>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> OwnerIndex<K> {
    pub fn new(owner: fn(&K) -> Option<&str>) -> Self {
        Self { owner, hasher: RandomState::new(), members: RwLock::default() }
    }

    pub fn of(&self, owner: &str) -> Vec<Arc<K>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let found = members.get(&self.hasher.hash_one(owner)).into_iter().flatten();
        found.filter(|object| (self.owner)(object) == Some(owner)).cloned().collect()
    }

    /// Applies an event to the cache and the index, and returns the changed objects. The index is locked until both are
    /// updated, so an object that is in the cache is also found in the index.
    pub fn apply(&self, event: watcher::Event<K>, writer: &mut Writer<K>, cache: &Store<K>) -> Vec<Arc<K>> {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        writer.apply_watcher_event(&event);
        match event {
            watcher::Event::Apply(object) => {
                let shared = cache.get(&ObjectRef::from_obj(&object)).unwrap_or_else(|| Arc::new(object));
                self.put(&mut members, &shared);
                vec![shared]
            }
            watcher::Event::Delete(object) => {
                self.remove(&mut members, &object);
                vec![Arc::new(object)]
            }
            // The cache applies a list only when it is complete.
            watcher::Event::Init | watcher::Event::InitApply(_) => vec![],
            watcher::Event::InitDone => {
                let all = cache.state();
                members.clear();
                all.iter().for_each(|object| self.put(&mut members, object));
                all
            }
        }
    }

    /// Inserts or replaces an object.
    fn put(&self, members: &mut HashMap<u64, Vec<Arc<K>>>, object: &Arc<K>) {
        let Some(owner) = (self.owner)(object) else { return };
        let objects = members.entry(self.hasher.hash_one(owner)).or_insert_with(|| Vec::with_capacity(1));
        match objects.iter_mut().find(|other| is_same(&***other, &**object)) {
            Some(old) => *old = object.clone(),
            None => objects.push(object.clone()),
        }
    }

    fn remove(&self, members: &mut HashMap<u64, Vec<Arc<K>>>, object: &K) {
        let Some(owner) = (self.owner)(object) else { return };
        let hash = self.hasher.hash_one(owner);
        if let Some(objects) = members.get_mut(&hash) {
            objects.retain(|other| !is_same(&**other, object));
            if objects.is_empty() {
                members.remove(&hash);
            }
        }
    }
}

fn is_same<K: Resource>(one: &K, other: &K) -> bool {
    let (one, other) = (one.meta(), other.meta());
    (&one.namespace, &one.name) == (&other.namespace, &other.name)
}

#[cfg(test)]
mod tests {
    use kube::{ResourceExt, runtime::reflector};
    use paddock_core::{api::Worker, fixtures::boards};

    use super::*;

    #[test]
    fn workers_are_found_by_their_claim() {
        let (store, mut writer) = reflector::store();
        let index = OwnerIndex::new(Worker::claim_uid);
        let worker = |name: &str, claim: &str, version: &str| {
            let mut worker = boards::board_worker(name, "p", claim);
            worker.metadata.resource_version = Some(version.into());
            worker
        };
        let mut apply = |event| index.apply(event, &mut writer, &store).len();
        let list = |workers: Vec<Worker>| {
            let listed = workers.into_iter().map(watcher::Event::InitApply);
            [watcher::Event::Init].into_iter().chain(listed).chain([watcher::Event::InitDone])
        };
        let found = |claim: &str| {
            let own = index.of(&format!("uid-{claim}"));
            own.iter().map(|worker| (worker.name_any(), worker.resource_version().unwrap())).collect::<Vec<_>>()
        };
        let changed: usize = list(vec![worker("a", "1", "1"), worker("c", "2", "1")]).map(&mut apply).sum();
        assert_eq!((changed, found("1")), (2, vec![("a".into(), "1".into())]));
        apply(watcher::Event::Apply(worker("b", "1", "1")));
        apply(watcher::Event::Apply(worker("a", "1", "2")));
        assert_eq!(found("1"), [("a".into(), "2".into()), ("b".into(), "1".into())], "replaced in place");
        apply(watcher::Event::Delete(worker("a", "1", "3")));
        assert_eq!(found("1"), [("b".into(), "1".into())]);
        assert_eq!(list(vec![worker("d", "1", "4")]).map(&mut apply).sum::<usize>(), 1);
        assert_eq!(
            (found("1"), found("2")),
            (vec![("d".into(), "4".into())], vec![]),
            "objects that a new list does not have are removed"
        );
    }
}
