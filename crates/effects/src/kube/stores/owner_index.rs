//! Objects found by their owner, beside the cache that finds them by their name.

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
pub struct Groups<K> {
    owner: fn(&K) -> Option<&str>,
    hasher: RandomState,
    /// By a hash: the owners' names would take more memory than all the rest.
    members: RwLock<HashMap<u64, Vec<Arc<K>>>>,
}

impl<K: Resource<DynamicType = ()> + Clone + 'static> Groups<K> {
    pub fn new(owner: fn(&K) -> Option<&str>) -> Self {
        Self { owner, hasher: RandomState::new(), members: RwLock::default() }
    }

    pub fn of(&self, owner: &str) -> Vec<Arc<K>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let here = members.get(&self.hasher.hash_one(owner)).into_iter().flatten();
        here.filter(|object| (self.owner)(object) == Some(owner)).cloned().collect()
    }

    /// Takes an event into the cache and the groups, and gives what there is to tell. Whoever has seen an object in the
    /// cache finds it in its group, too: until both have it, nobody looks into the groups.
    pub fn apply(&self, event: watcher::Event<K>, cache: &mut Writer<K>, shown: &Store<K>) -> Vec<Arc<K>> {
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        cache.apply_watcher_event(&event);
        match event {
            watcher::Event::Apply(object) => {
                let shared = shown.get(&ObjectRef::from_obj(&object)).unwrap_or_else(|| Arc::new(object));
                self.put(&mut members, &shared);
                vec![shared]
            }
            watcher::Event::Delete(object) => {
                self.remove(&mut members, &object);
                vec![Arc::new(object)]
            }
            // A list shows in the cache when it is complete, not before.
            watcher::Event::Init | watcher::Event::InitApply(_) => vec![],
            watcher::Event::InitDone => {
                let all = shown.state();
                members.clear();
                all.iter().for_each(|object| self.put(&mut members, object));
                all
            }
        }
    }

    /// In the place of the one before.
    fn put(&self, members: &mut HashMap<u64, Vec<Arc<K>>>, object: &Arc<K>) {
        let Some(owner) = (self.owner)(object) else { return };
        let here = members.entry(self.hasher.hash_one(owner)).or_insert_with(|| Vec::with_capacity(1));
        match here.iter_mut().find(|other| is_same(&***other, &**object)) {
            Some(before) => *before = object.clone(),
            None => here.push(object.clone()),
        }
    }

    fn remove(&self, members: &mut HashMap<u64, Vec<Arc<K>>>, object: &K) {
        let Some(owner) = (self.owner)(object) else { return };
        let hash = self.hasher.hash_one(owner);
        if let Some(here) = members.get_mut(&hash) {
            here.retain(|other| !is_same(&**other, object));
            if here.is_empty() {
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
        let groups = Groups::new(Worker::claim_uid);
        let worker = |name: &str, claim: &str, version: &str| {
            let mut worker = boards::board_worker(name, "p", claim);
            worker.metadata.resource_version = Some(version.into());
            worker
        };
        let mut apply = |event| groups.apply(event, &mut writer, &store).len();
        let list = |workers: Vec<Worker>| {
            let listed = workers.into_iter().map(watcher::Event::InitApply);
            [watcher::Event::Init].into_iter().chain(listed).chain([watcher::Event::InitDone])
        };
        let found = |claim: &str| {
            let own = groups.of(&format!("uid-{claim}"));
            own.iter().map(|worker| (worker.name_any(), worker.resource_version().unwrap())).collect::<Vec<_>>()
        };
        let told: usize = list(vec![worker("a", "1", "1"), worker("c", "2", "1")]).map(&mut apply).sum();
        assert_eq!((told, found("1")), (2, vec![("a".into(), "1".into())]));
        apply(watcher::Event::Apply(worker("b", "1", "1")));
        apply(watcher::Event::Apply(worker("a", "1", "2")));
        assert_eq!(found("1"), [("a".into(), "2".into()), ("b".into(), "1".into())], "each in its place");
        apply(watcher::Event::Delete(worker("a", "1", "3")));
        assert_eq!(found("1"), [("b".into(), "1".into())]);
        assert_eq!(list(vec![worker("d", "1", "4")]).map(&mut apply).sum::<usize>(), 1);
        assert_eq!(
            (found("1"), found("2")),
            (vec![("d".into(), "4".into())], vec![]),
            "what a new list does not have is gone"
        );
    }
}
