use serde_json::json;

use super::*;

fn model(service: Service) -> Model {
    Model::of_botocore(&tool("moto").unwrap(), service).unwrap()
}

fn exchange(service: Service, action: &str, sent: &str, answer: Answer) -> Exchange {
    Exchange { service, action: action.to_owned(), sent: sent.to_owned().into(), answer }
}

fn ec2(action: &str, form: &str, content: &str) -> Exchange {
    let form = format!("Action={action}&Version=2016-11-15&{form}");
    exchange(Service::Ec2, action, &form, Answer::xml(xml::answer(action, content)))
}

#[test]
fn requests_in_ec2s_query_protocol_are_checked() {
    let model = model(Service::Ec2);
    let found = |form: &str| violations(&model, &ec2("CreateFleet", form, "<fleetId>fleet-1</fleetId>"));
    let template = "LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName";
    let good = format!("Type=instant&TargetCapacitySpecification.TotalTargetCapacity=1&{template}=linux");
    assert_eq!(found(&good), [] as [String; 0]);
    let wanted = |more: &str, words: &str| {
        let all = found(&format!("{good}&{more}"));
        assert!(all.len() == 1 && all[0].contains(words), "{more}: {all:?}");
    };
    wanted("Tpye=instant", "ec2 CreateFleet request: Tpye is no member");
    wanted("LaunchTemplateConfigs.1.Overrides.1.Zone=a", "LaunchTemplateConfigs[].Overrides[].Zone is no member");
    wanted("OnDemandOptions.AllocationStrategy=cheap", "which is no value of its enum");
    wanted("OnDemandOptions.MinTargetCapacity=many", "which is no integer");
    wanted("DryRun=perhaps", "which is no truth value");
    let requirements = "LaunchTemplateConfigs.1.Overrides.1.InstanceRequirements";
    wanted(&format!("{requirements}.VCpuCount.Min=2"), "InstanceRequirements.MemoryMiB is missing");
    let lists = format!("{requirements}.VCpuCount.Min=2&{requirements}.MemoryMiB.Min=2");
    wanted(&format!("{lists}&{requirements}.AllowedInstanceType.1=m5_large"), "does not match its pattern");
    let name = "x".repeat(129);
    wanted(
        &format!("LaunchTemplateConfigs.2.LaunchTemplateSpecification.LaunchTemplateName={name}"),
        "out of its range",
    );
    assert!(found("Type=instant").iter().any(|what| what.contains("LaunchTemplateConfigs is missing")));
}

#[test]
fn answers_of_ec2_are_checked() {
    let model = model(Service::Ec2);
    let found = |content: &str| violations(&model, &ec2("CreateFleet", FORM, content));
    let set = |item: &str| format!("<fleetInstanceSet><item>{item}</item></fleetInstanceSet>");
    let ids = "<instanceIds><item>i-1</item></instanceIds>";
    assert_eq!(found(&set(&format!("{ids}<lifecycle>spot</lifecycle>"))), [] as [String; 0]);
    for (content, words) in [
        (set("<zone>a</zone>"), "Instances[].zone is no member"),
        (set("<lifecycle>forever</lifecycle>"), "no value of its enum"),
        (set("<instanceIds><id>i-1</id></instanceIds>"), "has an element id"),
        ("<fleetId>1</fleetId><fleetId>2</fleetId>".to_owned(), "FleetId is there twice"),
        ("<errorSet><item><errorCode>Nonsense</errorCode></item></errorSet>".to_owned(), "not in the table"),
    ] {
        let all = found(&content);
        assert!(all.len() == 1 && all[0].contains(words), "{content}: {all:?}");
    }
    let other = exchange(Service::Ec2, "CreateFleet", FORM, Answer::xml(xml::answer("RunInstances", "")));
    assert!(violations(&model, &other)[0].contains("another name"));
}

const FORM: &str = "Action=CreateFleet&Version=2016-11-15&TargetCapacitySpecification.TotalTargetCapacity=1&\
                    LaunchTemplateConfigs.1.LaunchTemplateSpecification.LaunchTemplateName=linux";

#[test]
fn the_json_protocols_are_checked() {
    let dynamodb = model(Service::DynamoDb);
    let found = |sent: Value, answer: Value| {
        let answer = Answer::json(&answer);
        violations(&dynamodb, &exchange(Service::DynamoDb, "GetItem", &sent.to_string(), answer))
    };
    let good = json!({ "TableName": "paddock", "Key": { "PK": { "S": "a" } } });
    let item = json!({ "Item": { "PK": { "S": "a" }, "n": { "L": [{ "N": "1" }, { "BOOL": true }] } } });
    assert_eq!(found(good.clone(), item), [] as [String; 0]);
    for (sent, answer, words) in [
        (json!({ "TableName": "paddock" }), json!({}), "request: Key is missing"),
        (json!({ "TableName": "", "Key": {} }), json!({}), "TableName is of size 0, out of its range"),
        (json!({ "TableName": "paddock", "Key": {}, "Consistent": true }), json!({}), "Consistent is no member"),
        (json!({ "TableName": "paddock", "Key": {}, "ConsistentRead": "true" }), json!({}), "is no truth value"),
        (good.clone(), json!({ "Item": { "n": { "N": 1 } } }), "answer: Item[].N is no text"),
        (good.clone(), json!({ "Item": { "n": { "L": [{ "X": "1" }] } } }), "Item[].L[].X is no member"),
    ] {
        let all = found(sent, answer);
        assert!(all.len() == 1 && all[0].contains(words), "{words}: {all:?}");
    }
    let sqs = model(Service::Sqs);
    let receive = |sent: Value| {
        let answer = Answer::json(&json!({}));
        violations(&sqs, &exchange(Service::Sqs, "ReceiveMessage", &sent.to_string(), answer))
    };
    assert!(receive(json!({ "QueueUrl": "q", "MaxNumberOfMessages": 1.5 }))[0].contains("is no integer"));
    let unknown = exchange(Service::Sqs, "EatMessage", "{}", Answer::json(&json!({})));
    assert_eq!(violations(&sqs, &unknown), ["sqs EatMessage: no such operation"]);
}

#[test]
fn errors_come_from_the_table() {
    let model = model(Service::Ec2);
    let found = |action: &str, code: &str, status| {
        let answer = Answer::error(Service::Ec2, "InternalError", "", Some(status));
        let answer = Answer { body: answer.text().replace("InternalError", code).into(), ..answer };
        violations(&model, &exchange(Service::Ec2, action, "Nonsense=1", answer))
    };
    assert_eq!(found("CreateFleet", "InvalidFleetConfig", 400), [] as [String; 0], "a refused request may be wrong");
    assert!(found("CreateFleet", "InvalidFleetConfig", 500)[0].contains("has status 500 and not 400"));
    assert!(found("DescribeSubnets", "InvalidFleetConfig", 400)[0].contains("not in the table"));
    assert!(found("CreateFleet", "InvalidFleet", 400)[0].contains("not in the table"));
}

#[test]
fn errors_with_the_model_as_their_source_are_in_it() {
    for service in [Service::DynamoDb, Service::Sqs] {
        let wrong = errors::not_in_model(service, &model(service));
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
