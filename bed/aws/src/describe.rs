//! Paginates `DescribeInstances` by instance. moto paginates by reservation and returns every instance at once.

use anyhow::{Context, Result};
use roxmltree::{Document, Node};

use crate::{instances::Ending, xml};

/// Which instances to show, and how.
pub struct View<'a> {
    pub shown: &'a dyn Fn(&str) -> bool,
    /// Why an instance ended. moto does not know.
    pub ending: &'a dyn Fn(&str) -> Option<Ending>,
    /// Continue after this instance.
    pub after: Option<&'a str>,
    pub most: usize,
}

/// Cuts the answer `text` down to a page. The token of the next page is the last instance of this one.
pub fn page(text: &str, view: &View<'_>) -> Result<String> {
    let document = Document::parse(text)?;
    let set = xml::find(&document, "reservationSet").context("an answer of moto without reservationSet")?;
    let reservations: Vec<_> = set.children().filter(Node::is_element).collect();
    let mut instances = Vec::new();
    for (index, reservation) in reservations.iter().enumerate() {
        for item in xml::items(*reservation, "instancesSet") {
            let id = xml::text(item, &["instanceId"]).unwrap_or_default();
            if (view.shown)(id) {
                instances.push((index, id, item));
            }
        }
    }
    let start = view.after.and_then(|last| instances.iter().position(|(_, id, _)| *id == last)).map_or(0, |at| at + 1);
    let end = instances.len().min(start + view.most);
    let chosen = &instances[start..end];

    let mut out = String::new();
    for group in chosen.chunk_by(|a, b| a.0 == b.0) {
        let reservation = reservations[group[0].0];
        let list = xml::child(reservation, "instancesSet").context("a reservation without instances")?;
        out += &text[reservation.range().start..list.range().start];
        out += "<instancesSet>";
        for (_, id, item) in group {
            out += &instance(text, *item, (view.ending)(id));
        }
        out += "</instancesSet>";
        out += &text[list.range().end..reservation.range().end];
    }
    let more = end < instances.len();
    let token = chosen.last().filter(|_| more).map(|(_, id, _)| xml::element("nextToken", id)).unwrap_or_default();
    Ok(xml::answer("DescribeInstances", &format!("<reservationSet>{out}</reservationSet>{token}")))
}

/// An instance's element, with the reason of its state as EC2 has it.
fn instance(text: &str, item: Node<'_, '_>, ending: Option<Ending>) -> String {
    let Some(Ending { code, message, reason }) = ending else { return text[item.range()].to_owned() };
    let code_and_message = xml::element("code", &code) + &xml::element("message", &message);
    let new = [
        ("reason", xml::element("reason", &reason)),
        ("stateReason", format!("<stateReason>{code_and_message}</stateReason>")),
    ];
    let mut out = text[item.range()].to_owned();
    for (name, element) in new {
        let Ok(document) = Document::parse(&out) else { continue };
        match xml::child(document.root_element(), name).map(|old| old.range()) {
            Some(old) => out.replace_range(old, &element),
            None => out.insert_str(out.len() - "</item>".len(), &element),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> String {
        let item = |id: &str| format!("<item><instanceId>{id}</instanceId><stateReason><code/></stateReason></item>");
        let reservation = |ids: &[&str]| {
            let items: String = ids.iter().map(|id| item(id)).collect();
            format!("<item><reservationId>r</reservationId><instancesSet>{items}</instancesSet><x/></item>")
        };
        let all = reservation(&["i-1", "i-2", "i-3"]) + &reservation(&["i-4"]);
        format!("<R xmlns=\"urn:x\"><reservationSet>{all}</reservationSet></R>")
    }

    fn ids(page: &str) -> (Vec<String>, Option<String>) {
        let document = Document::parse(page).unwrap();
        let all = document.descendants().filter(|node| node.tag_name().name() == "instanceId");
        let token = xml::find(&document, "nextToken").and_then(|node| node.text()).map(str::to_owned);
        (all.filter_map(|node| node.text().map(str::to_owned)).collect(), token)
    }

    #[test]
    fn pages_cut_through_reservations_and_skip_what_is_hidden() {
        let view = |after, most| View { shown: &|id| id != "i-2", ending: &|_| None, after, most };
        let first = ids(&page(&answer(), &view(None, 2)).unwrap());
        assert_eq!(first, (vec!["i-1".into(), "i-3".into()], Some("i-3".into())));
        let second = ids(&page(&answer(), &view(Some("i-3"), 2)).unwrap());
        assert_eq!(second, (vec!["i-4".into()], None));
    }

    #[test]
    fn an_ended_instance_says_why() {
        let ending = |id: &str| (id == "i-4").then(Ending::reclaimed);
        let view = View { shown: &|_| true, ending: &ending, after: None, most: 9 };
        let page = page(&answer(), &view).unwrap();
        assert_eq!(page.matches("<code>Server.SpotInstanceTermination</code>").count(), 1);
        assert_eq!(page.matches("<code/>").count(), 3);
    }
}
