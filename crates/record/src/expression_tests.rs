use super::*;
use crate::{
    State,
    item::tests::instance,
    transition::{
        self,
        tests::{CLAIM, FUNCTIONS, identity, now, records},
    },
};

/// Evaluates the subset of DynamoDB conditions that is used here.
fn evaluate(condition: &str, expression: &Expression, item: &Item) -> bool {
    if let Some((left, right)) = condition.split_once(" AND ") {
        return evaluate(left, expression, item) && evaluate(right, expression, item);
    }
    if let Some(either) = condition.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        return either.split(" OR ").any(|part| evaluate(part, expression, item));
    }
    if let Some(negated) = condition.strip_prefix("NOT ") {
        return !evaluate(negated, expression, item);
    }
    let attribute = |alias: &str| item.get(expression.names.get(alias).map_or(alias, String::as_str));
    if let Some(name) = condition.strip_prefix("attribute_not_exists(") {
        return attribute(name.strip_suffix(')').unwrap()).is_none();
    }
    if let Some((name, list)) = condition.split_once(" IN (") {
        let list = list.strip_suffix(')').unwrap().split(", ");
        return attribute(name).is_some_and(|value| list.into_iter().any(|other| expression.values[other] == *value));
    }
    let [left, sign, right] = condition.split(' ').collect::<Vec<_>>()[..] else { panic!("{condition}") };
    let Some(left) = attribute(left) else { return false };
    let right = &expression.values[right];
    match sign {
        "=" => left == right,
        ">" => left.as_s().unwrap() > right.as_s().unwrap(),
        other => panic!("unknown comparison {other}"),
    }
}

/// The item after the update, which consists of `SET` only.
fn updated(expression: &Expression, item: &Item) -> Item {
    let mut item = item.clone();
    item.extend(expression.key.clone());
    for part in expression.update.strip_prefix("SET ").unwrap().split(", ") {
        let (name, value) = part.split_once(" = ").unwrap();
        item.insert(expression.names[name].clone(), expression.values[value].clone());
    }
    item
}

fn all() -> impl Iterator<Item = Transition> {
    let first = transition::launch(None, identity(), Some(CLAIM), "owner:acme", now(), now());
    FUNCTIONS
        .into_iter()
        .flat_map(|(_, function)| records().into_iter().filter_map(move |seen| function(&seen)))
        .chain(first)
}

#[test]
fn the_condition_agrees_with_holds() {
    let expiry = instance(State::Idle).threshold.unwrap();
    let stored: Vec<_> = records().into_iter().map(Some).chain([None]).collect();
    let mut held = 0;
    for made in all() {
        for now in [now(), expiry] {
            let expression = made.expression(now);
            for stored in &stored {
                let item = stored.as_ref().map(Instance::to_item).unwrap_or_default();
                let holds = made.holds(stored.as_ref(), now);
                assert_eq!(evaluate(&expression.condition, &expression, &item), holds, "{expression:?} {stored:?}");
                held += usize::from(holds);
            }
        }
    }
    assert!(held > 10, "{held}");
}

#[test]
fn the_update_writes_the_next_record() {
    for made in all() {
        let before = made.seen().map(Instance::to_item).unwrap_or_default();
        assert_eq!(updated(&made.expression(now()), &before), made.next().to_item());
    }
}

#[test]
fn every_name_and_value_is_used_as_dynamodb_requires() {
    for made in all() {
        let Expression { update, condition, names, values, .. } = made.expression(now());
        let text = format!("{update} {condition} ");
        let words: Vec<_> = text.split([' ', ',', '(', ')']).collect();
        for word in names.keys().chain(values.keys()) {
            assert!(words.contains(&word.as_str()), "{word} in {text}");
        }
        for word in words.iter().filter(|word| word.starts_with(['#', ':'])) {
            assert!(names.contains_key(*word) || values.contains_key(*word), "{word} in {text}");
        }
    }
}

#[test]
fn a_missing_attribute_is_treated_as_empty() {
    let seen = Instance::from_item(&HashMap::from([
        (a::STATE.to_owned(), AttributeValue::S("idle".into())),
        (a::THRESHOLD.to_owned(), AttributeValue::S("2025-05-31T12:00:00Z".into())),
    ]));
    let mut item = seen.to_item();
    [a::LEAVING, a::RUN_ID, a::CLAIM_UID].iter().for_each(|name| drop(item.remove(*name)));
    let expression = transition::renew(&seen, now(), now()).unwrap().expression(now());
    assert!(evaluate(&expression.condition, &expression, &item));
}

#[test]
fn an_instance_in_an_unknown_state_can_be_terminated_unless_its_state_has_changed() {
    let mut item = instance(State::Idle).to_item();
    item.insert(a::STATE.to_owned(), AttributeValue::S("hibernated".into()));
    let seen = Instance::from_item(&item);
    let expression = transition::terminate(&seen, "", "", "", now()).unwrap().expression(now());
    assert!(evaluate(&expression.condition, &expression, &item));
    item.insert(a::STATE.to_owned(), AttributeValue::S("idle".into()));
    assert!(!evaluate(&expression.condition, &expression, &item));
    item.remove(a::STATE);
    assert!(evaluate(&expression.condition, &expression, &item));
}

#[test]
fn a_retried_write_is_recognized_in_the_stored_record() {
    for made in all() {
        let stored = Instance::from_item(&made.next().to_item());
        assert!(made.is_stored(&stored));
        assert!(!made.is_stored(&Instance { claims: 99, ..stored }));
        assert!(made.seen().is_none_or(|seen| !made.is_stored(seen)));
    }
}
