"""The words of the sample grammar: every Chinese word with the one English rendering it has.

Nothing is run here; grammar.py builds its rules from these tables.  To write the data set:

    python sample/write_sample.py

Where the English must know more than the Chinese shows, the table fixes it once: Tom is always "he", and 王教授 is
always "he" too.
"""

# ruff: noqa: F403, F405 - the tables are written with all of the word forms
from word_forms import *

# Several short entries stand on one line, so that a table can be seen at a glance.

# ---------------------------------------------------------------------------------------------------------- people

I = Person("我", "I", "me", "my", "my", Word("我", "I"), 0)  # noqa: E741 - this is what the word is
YOU = Person("你", "you", "you", "your", "your", Word("你", "you"), 1)
HE = Person("他", "he", "him", "his", "his", Word("他", "he"), 2)
SHE = Person("她", "she", "her", "her", "her", Word("她", "she"), 2)
WE = Person("我们", "we", "us", "our", "our", Word("我们", "we"), 1)
THEY = Person("他们", "they", "them", "their", "their", Word("他们", "they"), 1)
NAMES = [
    named("小明", "Xiaoming", "his"),
    named("王芳", "Wang Fang", "her"),
    named("张伟", "Zhang Wei", "his"),
    named("李娜", "Li Na", "her"),
    named("汤姆", "Tom", "his"),
    named("安娜", "Anna", "her"),
    named("约翰", "John", "his"),
    named("玛丽", "Mary", "her"),
]
YOUNG_KIN = [
    named("我弟弟", "my younger brother", "his"),
    named("我妹妹", "my younger sister", "her"),
    named("他哥哥", "his older brother", "his"),
    named("她姐姐", "her older sister", "her"),
]
PARENTS = [named("我爸爸", "my father", "his"), named("我妈妈", "my mother", "her")]
GRANDPARENTS = [named("我爷爷", "my grandfather", "his"), named("我奶奶", "my grandmother", "her")]
ELDERS = [*PARENTS, *GRANDPARENTS]
YOUR_KIN = [
    named("你爸爸", "your father", "his"),
    named("你妈妈", "your mother", "her"),
    named("你哥哥", "your older brother", "his"),
    named("你妹妹", "your younger sister", "her"),
]
TITLED = [named("王教授", "Professor Wang", "his"), named("李医生", "Dr. Li", "her")]

# Who may be the subject of what: nobody tells 你 what 你 did, parents do no homework, grandparents play no
# soccer, and "we" have no headache.
STUDENT_THIRD = [HE, SHE, *NAMES, *YOUNG_KIN]
ACTIVE_THIRD = [*STUDENT_THIRD, *PARENTS]
THIRD = [*ACTIVE_THIRD, *GRANDPARENTS]
ONE_STUDENT = [I, *STUDENT_THIRD]
STUDENTS = [*ONE_STUDENT, WE, THEY]
ONE_PERSON = [I, *THIRD]
ACTIVE = [I, *ACTIVE_THIRD, WE, THEY]
PEOPLE = [*ACTIVE, *GRANDPARENTS]
ASKED_STUDENTS = [YOU, HE, SHE, THEY, *NAMES]
ASKED = [*ASKED_STUDENTS, *YOUR_KIN]
ACTIVE_OTHERS = [I, HE, SHE, WE, THEY, *NAMES, *YOUNG_KIN, *PARENTS]
OTHERS = [*ACTIVE_OTHERS, *GRANDPARENTS]

PROFESSIONS = words(
    ("医生", "a doctor"),
    ("老师", "a teacher"),
    ("工程师", "an engineer"),
    ("护士", "a nurse"),
    ("律师", "a lawyer"),
    ("记者", "a reporter"),
    ("司机", "a driver"),
)

# ---------------------------------------------------------------------------------------------------------- things

BOOKS = [noun("书", "本", "book"), noun("小说", "本", "novel"), noun("词典", "本", "dictionary")]
CLOTHES = [
    noun("衬衫", "件", "shirt"),
    noun("毛衣", "件", "sweater"),
    noun("外套", "件", "coat"),
    noun("裙子", "条", "skirt"),
    noun("帽子", "顶", "hat"),
]
SHOES = portion("鞋", "双", "pair", "shoes")
PHONE = noun("手机", "部", "phone")
COMPUTER = noun("电脑", "台", "computer")
BICYCLE = noun("自行车", "辆", "bicycle")
DEVICES = [PHONE, COMPUTER, BICYCLE, noun("相机", "台", "camera"), noun("手表", "块", "watch")]
UMBRELLA = noun("雨伞", "把", "umbrella")
BACKPACK = noun("书包", "个", "backpack")
PEN = noun("笔", "支", "pen")
CUP = noun("杯子", "个", "cup")
MAP = noun("地图", "张", "map")
SMALL_THINGS = [UMBRELLA, BACKPACK, PEN, CUP, MAP]
TICKETS = [noun("电影票", "张", "movie ticket"), noun("火车票", "张", "train ticket")]
TABLE, CHAIR = noun("桌子", "张", "table"), noun("椅子", "把", "chair")
ANIMALS = [noun("猫", "只", "cat"), noun("狗", "只", "dog"), noun("鸟", "只", "bird")]
WALLET, KEY = noun("钱包", "个", "wallet"), noun("钥匙", "把", "key")
GOODS = [*BOOKS, *CLOTHES, SHOES, *DEVICES, *SMALL_THINGS]
CARRIED = [PHONE, UMBRELLA, BACKPACK, WALLET, KEY, COMPUTER]
LENT = [PHONE, COMPUTER, BICYCLE, UMBRELLA, PEN, *BOOKS]

FRUITS = [noun("苹果", "个", "apple"), noun("香蕉", "根", "banana")]
EGG = noun("鸡蛋", "个", "egg")
BREAD, CAKE = portion("面包", "块", "piece", "bread"), portion("蛋糕", "块", "piece", "cake")
RICE, NOODLES = portion("米饭", "碗", "bowl", "rice"), portion("面条", "碗", "bowl", "noodles")
DUMPLINGS = portion("饺子", "盘", "plate", "dumplings")
MEAL_FOODS = [RICE, NOODLES, DUMPLINGS]
FOODS = [*FRUITS, EGG, BREAD, CAKE, *MEAL_FOODS]
COFFEE, MILK = portion("咖啡", "杯", "cup", "coffee"), portion("牛奶", "杯", "cup", "milk")
DRINKS = [
    portion("茶", "杯", "cup", "tea"),
    COFFEE,
    MILK,
    portion("水", "杯", "glass", "water"),
    portion("果汁", "杯", "glass", "juice"),
    portion("啤酒", "瓶", "bottle", "beer"),
]
SOUP = portion("汤", "碗", "bowl", "soup")
CONTRASTS = [
    Word(
        f"喜欢{good.zh}，不喜欢{bad.zh}", f"like|likes {good.kind} but do|does not like {bad.kind}"
    )
    for group in (FRUITS, MEAL_FOODS, DRINKS, ANIMALS)
    for good in group
    for bad in group
    if good != bad
]

GPU, SERVER = noun("显卡", "块", "GPU"), noun("服务器", "台", "server")
MODEL, PROGRAM = noun("模型", "个", "model"), noun("程序", "个", "program")
EXPERIMENT = noun("实验", "个", "experiment")
STUDENT, TEACHER = noun("学生", "个", "student"), noun("老师", "个", "teacher")

COLORS = words(
    ("红色", "red"), ("蓝色", "blue"), ("黑色", "black"), ("白色", "white"), ("绿色", "green")
)

# ------------------------------------------------------------------------------------------------------ adjectives

EXPENSIVE, CHEAP = adjective("贵", "expensive"), adjective("便宜", "cheap", "cheaper")
BEAUTIFUL, NEW = adjective("漂亮", "beautiful"), adjective("新", "new", "newer")
BIG, SMALL = adjective("大", "big", "bigger"), adjective("小", "small", "smaller")
HEAVY, LIGHT = adjective("重", "heavy", "heavier"), adjective("轻", "light", "lighter")
INTERESTING, DIFFICULT = adjective("有意思", "interesting"), adjective("难", "difficult")
LONG = adjective("长", "long", "longer")
COLD, HOT = adjective("冷", "cold", "colder"), adjective("热", "hot", "hotter")
DELICIOUS, SWEET = adjective("好吃", "delicious"), adjective("甜", "sweet", "sweeter")
SALTY, SPICY = adjective("咸", "salty", "saltier"), adjective("辣", "spicy", "spicier")
BITTER, BURNING = (
    adjective("苦", "bitter"),
    adjective("烫", "hot", "hotter"),
)  # 烫 is hot to the tongue, 热 is not
WARM, COOL = adjective("暖和", "warm", "warmer"), adjective("凉快", "cool", "cooler")
TEMPERATURES = [COLD, HOT, WARM, COOL]
PERSONAL_QUALITIES = [
    adjective("高", "tall", "taller"),
    adjective("忙", "busy", "busier"),
    adjective("聪明", "smart", "smarter"),
    adjective("努力", "hardworking"),
    adjective("安静", "quiet", "quieter"),
]
QUICKLY, SLOWLY = adjective("快", "fast", "faster"), adjective("慢", "slowly")
WELL = adjective("好", "well", "better")
MANNERS = [
    Manner(zh, en, adverb)
    for zh, en, adverbs in [
        ("跑得", "run|runs", [QUICKLY, SLOWLY]),
        ("游得", "swim|swims", [QUICKLY, SLOWLY]),
        ("唱得", "sing|sings", [WELL]),
        ("跳得", "dance|dances", [WELL]),
        ("起得", "get|gets up", [adjective("早", "early", "earlier")]),
        ("睡得", "go|goes to bed", [adjective("晚", "late", "later")]),
    ]
    for adverb in adverbs
]
GOODS_DESCRIBED = [
    *described(BOOKS, [EXPENSIVE, CHEAP, NEW, HEAVY]),
    *described(BOOKS[:2], [INTERESTING, DIFFICULT, LONG]),
    *described(CLOTHES, [EXPENSIVE, CHEAP, BEAUTIFUL, BIG, SMALL]),
    *described([SHOES], [EXPENSIVE, CHEAP, BEAUTIFUL]),
    *described(DEVICES, [EXPENSIVE, CHEAP, NEW, LIGHT, HEAVY, BEAUTIFUL]),
    *described([BACKPACK], [EXPENSIVE, BIG, SMALL, LIGHT, HEAVY]),
]
FOODS_DESCRIBED = [
    *described(FRUITS, [BIG, SMALL, SWEET]),
    *described([CAKE], [SWEET, BIG, SMALL, DELICIOUS]),
    *described(MEAL_FOODS, [DELICIOUS, SALTY, BURNING]),
    *described([SOUP, NOODLES], [SPICY, SALTY, BURNING]),
    *described(DRINKS[:2], [BITTER, BURNING]),
]
DAMAGES = [
    *described([CUP], words(("打破", "broken"))),
    *described([BREAD, CAKE], words(("吃", "eaten"))),
    *described([MILK, COFFEE], words(("喝", "drunk"))),
    *described(DEVICES, words(("修好", "repaired"), ("弄坏", "damaged"))),
]


# ------------------------------------------------------------------------------------------------ places and travel

PLACES = [
    Place("图书馆", "the library", "in the library"),
    Place("医院", "the hospital", "at the hospital"),
    Place("银行", "the bank", "at the bank"),
    Place("超市", "the supermarket", "at the supermarket"),
    Place("公园", "the park", "in the park"),
    Place("火车站", "the train station", "at the train station"),
    Place("地铁站", "the subway station", "at the subway station"),
    Place("书店", "the bookstore", "at the bookstore"),
    Place("咖啡馆", "the coffee shop", "at the coffee shop"),
    Place("饭馆", "the restaurant", "at the restaurant"),
    Place("邮局", "the post office", "at the post office"),
    Place("体育馆", "the gym", "at the gym"),
    Place("博物馆", "the museum", "at the museum"),
    Place("电影院", "the movie theater", "at the movie theater"),
]
SCHOOL, HOME = Place("学校", "school", "at school"), Place("家里", "home", "at home")
AIRPORT = Place("机场", "the airport", "at the airport")
ROOMS = [
    Place("教室", "the classroom", "in the classroom"),
    Place("实验室", "the lab", "in the lab"),
    Place("食堂", "the cafeteria", "in the cafeteria"),
    Place("宿舍", "the dormitory", "in the dormitory"),
    Place("办公室", "the office", "in the office"),
]
CITIES = words(
    ("北京", "Beijing"),
    ("上海", "Shanghai"),
    ("南京", "Nanjing"),
    ("广州", "Guangzhou"),
    ("成都", "Chengdu"),
    ("杭州", "Hangzhou"),
    ("巴黎", "Paris"),
    ("伦敦", "London"),
    ("东京", "Tokyo"),
    ("纽约", "New York"),
)
PLACES_TO_EAT = [
    place for place in PLACES + ROOMS if place.zh in ("饭馆", "咖啡馆", "食堂", "宿舍", "办公室")
]
MEETING_PLACES = [
    place
    for place in PLACES
    if place.zh in ("图书馆", "公园", "咖啡馆", "饭馆", "体育馆", "电影院")
]
WORKPLACES = [place for place in PLACES if place.zh not in ("公园", "体育馆", "地铁站")]
QUIET_PLACES = [
    place
    for place in PLACES + ROOMS
    if place.zh in ("图书馆", "电影院", "博物馆", "银行", "书店", "教室", "实验室")
]
CHINESE_CITIES = CITIES[:6]
SNOWY_CITIES = [city for city in CITIES if city.zh != "广州"]
TRANSPORT = words(
    ("坐地铁", "by subway"),
    ("坐公共汽车", "by bus"),
    ("坐出租车", "by taxi"),
    ("骑自行车", "by bicycle"),
    ("走路", "on foot"),
    ("开车", "by car"),
)
LONG_TRANSPORT = words(("坐火车", "by train"), ("坐飞机", "by plane"), ("开车", "by car"))
DISTANCES = words(("很远", "far from"), ("不远", "not far from"), ("很近", "close to"))
POSITIONS = words(
    ("旁边", "next to"),
    ("前面", "in front of"),
    ("后面", "behind"),
    ("对面", "across from"),
    ("北边", "north of"),
    ("南边", "south of"),
    ("左边", "to the left of"),
    ("右边", "to the right of"),
)
SURFACES = words(
    ("桌子上", "on the table"),
    ("椅子上", "on the chair"),
    ("床上", "on the bed"),
    ("箱子里", "in the box"),
    ("书包里", "in the backpack"),
)

# ------------------------------------------------------------------------------------------------------------ time

YESTERDAY, DAY_BEFORE = Word("昨天", "yesterday"), Word("前天", "the day before yesterday")
PAST_DAYS = [
    YESTERDAY,
    DAY_BEFORE,
    *words(("昨天晚上", "last night"), ("今天早上", "this morning")),
]
PAST = [*PAST_DAYS, *words(("上个星期", "last week"), ("上个月", "last month"))]
FUTURE = words(
    ("明天", "tomorrow"),
    ("后天", "the day after tomorrow"),
    ("今天晚上", "tonight"),
    ("这个周末", "this weekend"),
    ("下个星期", "next week"),
    ("下个月", "next month"),
)
FUTURE_DAYS = FUTURE[:4]
TRIP_TIMES = [*FUTURE[:2], *FUTURE[4:], Word("明年", "next year")]
WEEKDAYS = words(
    ("星期一", "Monday"),
    ("星期二", "Tuesday"),
    ("星期三", "Wednesday"),
    ("星期四", "Thursday"),
    ("星期五", "Friday"),
    ("星期六", "Saturday"),
    ("星期天", "Sunday"),
)
MONTHS = [
    Word(chinese_numeral(number) + "月", name)
    for number, name in enumerate(
        [
            "January",
            "February",
            "March",
            "April",
            "May",
            "June",
            "July",
            "August",
            "September",
            "October",
            "November",
            "December",
        ],
        start=1,
    )
]
DATES = [
    Word(f"{month}{chinese_numeral(day)}号", f"on the {ENGLISH_ORDINALS[day]} of {month.en}")
    for month in MONTHS
    for day in range(1, 13)
]
ORDINALS = [Word(chinese_numeral(number), ENGLISH_ORDINALS[number]) for number in range(1, 13)]
TIMES = words(("一次", "once"), ("两次", "twice"), ("三次", "three times"), ("四次", "four times"))
FREQUENCIES = words(
    ("总是", "always"),
    ("经常", "often"),
    ("有时候", "sometimes"),
    ("很少", "seldom"),
    ("从来不", "never"),
)
# 早上 and 上午 are both "in the morning"; each has its own hours, so that the English tells which one it was.
DAY_PARTS = [
    ("早上", "morning", range(6, 9)),
    ("上午", "morning", range(9, 12)),
    ("下午", "afternoon", range(1, 6)),
    ("晚上", "evening", range(6, 11)),
]
QUARTERS = [("点", ""), ("点半", "half past "), ("点一刻", "a quarter past ")]

CLOCK = [
    Clock(
        part_zh + chinese_number(hour) + minute_zh,
        f"at {minute_en}{english_number(hour)} in the {part}",
        minute_en + english_number(hour),
        part,
    )
    for part_zh, part, hours in DAY_PARTS
    for hour in hours
    for minute_zh, minute_en in QUARTERS
]
MORNINGS, DAYTIME, EVENINGS, NIGHTS = (
    CLOCK[:9],
    CLOCK[9:33],
    CLOCK[33:42],
    CLOCK[42:],
)  # the order of DAY_PARTS
MINUTES = [Word(f"{n.zh}分钟", f"{n.en} minutes") for n in numbers(5, 10, 15, 20, 30, 40)]
HOURS = [
    Word("一个小时", "an hour"),
    *[Word(f"{n.zh}个小时", f"{n.en} hours") for n in numbers(2, 3, 4, 5, 6)],
]
DAYS = [Word(f"{n.zh}天", f"{n.en} days") for n in numbers(2, 3, 4, 5, 6, 7, 8, 9, 10)]
WEEKS = [
    Word("一个星期", "a week"),
    *[Word(f"{n.zh}个星期", f"{n.en} weeks") for n in numbers(2, 3, 4)],
]
YEARS = [
    Word("一年", "a year"),
    *[Word(f"{n.zh}年", f"{n.en} years") for n in numbers(2, 3, 4, 5, 6, 8, 10)],
]
SPRING, SUMMER, AUTUMN, WINTER = words(
    ("春天", "spring"), ("夏天", "summer"), ("秋天", "autumn"), ("冬天", "winter")
)
SEASONS_DESCRIBED = [
    *described([SPRING], [WARM, BEAUTIFUL]),
    *described([SUMMER], [HOT, COOL]),
    *described([AUTUMN], [COOL, BEAUTIFUL]),
    *described([WINTER], [COLD, WARM]),
]

# ------------------------------------------------------------------------------------------------------ activities

LANGUAGES = words(
    ("中文", "Chinese"),
    ("英语", "English"),
    ("法语", "French"),
    ("日语", "Japanese"),
    ("德语", "German"),
)
SUBJECTS = words(
    ("数学", "math"),
    ("物理", "physics"),
    ("化学", "chemistry"),
    ("历史", "history"),
    ("音乐", "music"),
)
COUNTRIES = [
    Country(zh, en, language)
    for (zh, en), language in zip(
        [
            ("中国", "China"),
            ("英国", "Britain"),
            ("法国", "France"),
            ("日本", "Japan"),
            ("德国", "Germany"),
        ],
        LANGUAGES,
    )
]
LESSONS = [
    Word(subject.zh + "课", with_article(subject.en + " class")) for subject in SUBJECTS + LANGUAGES
]
HOBBIES = activities(
    ("打篮球", "play basketball"),
    ("踢足球", "play soccer"),
    ("打网球", "play tennis"),
    ("游泳", "swim"),
    ("跑步", "run"),
    ("下棋", "play chess"),
    ("唱歌", "sing"),
    ("跳舞", "dance"),
    ("弹钢琴", "play the piano"),
    ("听音乐", "listen to music"),
    ("看电视", "watch TV"),
    ("看书", "read"),
    ("爬山", "go hiking"),
    ("散步", "take a walk"),
    ("做饭", "cook"),
)
SHARED_HOBBIES = [
    *[hobby for hobby in HOBBIES if hobby.zh != "看书"],  # one reads alone
    *activities(
        ("看电影", "watch a movie"), ("喝咖啡", "drink coffee"), ("做实验", "do an experiment")
    ),
]
EXERTIONS = [
    *HOBBIES[:5],
    *activities(("跳舞", "dance"), ("爬山", "go hiking"), ("去上课", "go to class")),
]
CONSUMPTION = [
    *[activity("吃" + food.zh, "eat " + food.kind) for food in FOODS],
    *[activity("喝" + drink.zh, "drink " + drink.kind) for drink in DRINKS],
]
CHORES = activities(
    ("做作业", "do homework"),
    ("打扫房间", "clean the room"),
    ("洗衣服", "do the laundry"),
    ("写报告", "write the report"),
    ("写代码", "write code"),
    ("复习中文", "review Chinese"),
)
SKILLS = activities(
    ("游泳", "swim"),
    ("开车", "drive"),
    ("做饭", "cook"),
    ("骑马", "ride a horse"),
    ("下棋", "play chess"),
    ("弹钢琴", "play the piano"),
    ("写代码", "write code"),
    *[(f"说{word.zh}", f"speak {word.en}") for word in LANGUAGES],
)
PRACTICES = [
    separable("打", "篮球", "play basketball"),
    separable("踢", "足球", "play soccer"),
    separable("打", "网球", "play tennis"),
    separable("弹", "钢琴", "play the piano"),
]
STUDIES = [
    *PRACTICES,
    separable("写", "代码", "write code"),
    *[separable("学", word.zh, f"study {word.en}") for word in LANGUAGES],
]
EVENING_HABITS = activities(
    ("做作业", "do homework"),
    ("看电视", "watch TV"),
    ("看书", "read"),
    ("散步", "take a walk"),
)
NIGHT_HABITS = activities(("洗澡", "take a shower"), ("睡觉", "go to bed"))
MORNING_HABITS = activities(
    ("起床", "get up"), ("吃早饭", "have breakfast"), ("跑步", "run"), ("锻炼", "exercise")
)
SMALL_HABITS = activities(
    ("听音乐", "listen to music"),
    ("散步", "take a walk"),
    ("看书", "read"),
    ("喝牛奶", "drink milk"),
    ("锻炼", "exercise"),
)
BACKGROUND = activities(
    ("听音乐", "listen to music"),
    ("喝咖啡", "drink coffee"),
    ("唱歌", "sing"),
    ("吃苹果", "eat apples"),
)
MEALS = words(("早饭", "breakfast"), ("午饭", "lunch"), ("晚饭", "dinner"))
PLACED = activities(
    ("在图书馆看书", "read in the library"),
    ("在图书馆做作业", "do homework in the library"),
    ("在图书馆学英语", "study English in the library"),
    ("在公园跑步", "run in the park"),
    ("在公园散步", "take a walk in the park"),
    ("在公园下棋", "play chess in the park"),
    ("在体育馆打篮球", "play basketball at the gym"),
    ("在体育馆打网球", "play tennis at the gym"),
    ("在实验室做实验", "do an experiment in the lab"),
    ("在实验室写代码", "write code in the lab"),
    ("在宿舍睡觉", "sleep in the dormitory"),
    ("在宿舍听音乐", "listen to music in the dormitory"),
    ("在咖啡馆喝咖啡", "drink coffee at the coffee shop"),
    ("在咖啡馆看书", "read at the coffee shop"),
    ("在食堂吃午饭", "have lunch in the cafeteria"),
    ("在教室做作业", "do homework in the classroom"),
)
# Where one goes and what for: 去 / go comes first.
ERRANDS = words(
    ("图书馆还书", "to the library to return a book"),
    ("图书馆借书", "to the library to borrow a book"),
    ("超市买牛奶", "to the supermarket to buy milk"),
    ("超市买面包", "to the supermarket to buy bread"),
    ("公园跑步", "to the park to run"),
    ("公园散步", "to the park to take a walk"),
    ("银行取钱", "to the bank to withdraw money"),
    ("邮局寄信", "to the post office to mail a letter"),
    ("机场接朋友", "to the airport to pick up a friend"),
    ("火车站接朋友", "to the train station to pick up a friend"),
    ("体育馆打篮球", "to the gym to play basketball"),
    ("体育馆打网球", "to the gym to play tennis"),
    ("实验室做实验", "to the lab to do an experiment"),
    ("书店买书", "to the bookstore to buy a book"),
    ("医院看病", "to the hospital to see a doctor"),
    ("饭馆吃饭", "to the restaurant to eat"),
)
# What one finishes: 已经……了 / has already, 还没…… / not yet.
ACHIEVEMENTS = activities(
    ("做完作业", "finish the homework"),
    ("写完报告", "finish the report"),
    ("做完实验", "finish the experiment"),
    ("吃完早饭", "finish breakfast"),
    ("吃完午饭", "finish lunch"),
    ("买好火车票", "buy the train ticket"),
    ("洗完衣服", "do the laundry"),
    ("打扫完房间", "clean the room"),
    ("交作业", "hand in the homework"),
    ("看完这本小说", "finish this novel"),
    ("去银行取钱", "go to the bank to withdraw money"),
    ("回家", "go home"),
    ("到学校", "arrive at the school"),
    ("起床", "get up"),
)
ADVICE = activities(
    ("多喝水", "drink more water"),
    ("少喝咖啡", "drink less coffee"),
    ("早点睡觉", "go to bed earlier"),
    ("早点起床", "get up earlier"),
    ("多锻炼", "exercise more"),
    ("去看医生", "see a doctor"),
    ("好好休息", "get a good rest"),
    ("按时吃饭", "eat on time"),
    ("少看电视", "watch less TV"),
)
DOCTORS_ADVICE = [advice for advice in ADVICE if advice.zh != "去看医生"]
ASSIGNMENTS = activities(
    ("交作业", "hand in the homework"),
    ("写完报告", "finish the report"),
    ("重做实验", "repeat the experiment"),
    ("复习第三章", "review chapter three"),
    ("读完这篇论文", "finish this paper"),
    ("改好程序", "fix the program"),
)
SYMPTOMS = words(
    ("头疼", "have|has a headache"),
    ("牙疼", "have|has a toothache"),
    ("肚子疼", "have|has a stomachache"),
    ("发烧了", "have|has a fever"),
    ("感冒了", "have|has a cold"),
)
TROUBLES = words(
    ("病了", "sick"),
    ("很累", "very tired"),
    ("很忙", "very busy"),
)
DAY_EVENTS = words(
    ("考试", "the exam"),
    ("会议", "the meeting"),
    ("面试", "the interview"),
    ("讲座", "the lecture"),
)
EVENING_EVENTS = words(("比赛", "the game"), ("音乐会", "the concert"), ("电影", "the movie"))
WEATHER = activities(("下雨", "rain"), ("下雪", "snow"))
DUTIES = activities(
    ("去上课", "go to class"),
    ("早起", "get up early"),
    ("做饭", "cook"),
    ("打扫房间", "clean the room"),
    ("洗衣服", "do the laundry"),
    ("去图书馆还书", "go to the library to return a book"),
)
NUISANCES = activities(
    ("抽烟", "smoke"),
    ("大声说话", "talk loudly"),
    ("吃东西", "eat"),
    ("睡觉", "sleep"),
    ("打电话", "make phone calls"),
)
INDOOR_PLANS = activities(
    ("在家看书", "read at home"),
    ("在家看电视", "watch TV at home"),
    ("在家做饭", "cook at home"),
    ("坐地铁去学校", "go to school by subway"),
    ("待在宿舍", "stay in the dormitory"),
)
OUTDOOR_PLANS = activities(
    ("去爬山", "go hiking"),
    ("去公园跑步", "go to the park to run"),
    ("去公园散步", "go to the park to take a walk"),
    ("骑自行车去学校", "go to school by bicycle"),
)
PROJECTS = activities(
    ("写完报告", "finish the report"),
    ("做完实验", "finish the experiment"),
    ("看完这本小说", "finish this novel"),
    ("训练这个模型", "train this model"),
    ("读完这篇论文", "finish this paper"),
)
STATES = words(
    ("程序有一个错误", "program has a bug"),
    ("程序跑得很快", "program runs very fast"),
    ("程序跑得很慢", "program runs very slowly"),
    ("实验成功了", "experiment succeeded"),
    ("实验失败了", "experiment failed"),
    ("报告写得很好", "report is written very well"),
    ("报告太长了", "report is too long"),
    ("模型太大了", "model is too big"),
    ("模型很准确", "model is very accurate"),
)
